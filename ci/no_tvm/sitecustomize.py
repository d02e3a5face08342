"""Put this folder on PYTHONPATH and the compiler's packages cannot be imported.

CI runs the runtime's tests so: serving needs tvm_ffi and libtvm_runtime.so, and nothing else of
what tuning needs. None in ``sys.modules`` refuses the import and makes ``find_spec`` say that the
package is absent, which is how a machine without it looks.
"""

import sys

for name in ("tvm", "xgboost", "mlflow"):
    sys.modules[name] = None  # type: ignore[assignment]
