"""Errors in the declaration of a kernel."""


class DeclarationError(TypeError):
    """A kernel's declaration is invalid: the message names the kernel, rule or field, and suggests a correction."""
