"""Searching choices for a spec on a device. One noun per file.

``search`` proposes, ``compiler`` and ``device`` answer through MetaSchedule's interfaces (each over
processes of its own: ``process``), ``check`` and ``timing`` run inside the measuring process,
``log`` remembers, ``mlflow_log`` tells.
"""
