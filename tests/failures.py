"""One test that checks many items, such as all shipped records, and names each that fails."""


def failures(check, items, name=str):
    """The name and the error of each of `items` for which `check` raises one, in their order."""
    failed = []
    for item in items:
        try:
            check(item)
        except Exception as error:
            failed.append(f"{name(item)}: {type(error).__name__}: {error}")
    return failed
