"""What a kernel's author gets wrong, by name."""


class DeclarationError(TypeError):
    """A kernel declares what cannot be meant: names the kernel, rule or field, and says what to write instead."""
