"""What is wrong with a bundle."""


class BundleError(Exception):
    """A bundle, its manifest or one of its files is refused; the message is the whole reason."""
