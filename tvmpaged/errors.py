"""The one error of its own that every layer may raise."""


class UserError(Exception):
    """Something the user can put right; its message says how.

    The command line prints it as one message, without a traceback. A wrong argument is better a
    `ValueError` or `TypeError` that names the argument, its value and what is allowed.
    """
