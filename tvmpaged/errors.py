"""The one error of its own that every layer may raise, and what a missing module asks for."""

#: Module that may be absent -> the extra that brings it.
EXTRAS = {
    "accelerate": "hf",
    "cloudpickle": "tune",
    "cryptography": "sign",
    "gguf": "hf",
    "jinja2": "hf",
    "matplotlib": "tune",
    "ml_dtypes": "tune",
    "mlflow": "tune",
    "psutil": "tune",
    "safetensors": "hf",
    "tornado": "tune",
    "transformers": "hf",
    "tvm": "tune",
    "xgboost": "tune",
}


class UserError(Exception):
    """Something the user can put right; its message says how.

    The command line prints it as one message, without a traceback. A wrong argument is better a
    `ValueError` or `TypeError` that names the argument, its value and what is allowed.
    """


def missing_extra(error: ImportError) -> str | None:
    """Return what to install where a module is absent or not whole; None: it is no extra's."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is None:
        return None
    state = "not installed" if isinstance(error, ModuleNotFoundError) else f"not whole ({error})"
    return f"this needs {module}, which is {state}; run: pip install 'tvmpaged[{extra}]'"
