"""What is wrong with a bundle."""

from tvmpaged.errors import UserError


class BundleError(UserError):
    """A bundle, its manifest or one of its files is refused; the message is the whole reason."""
