"""What the tests of the pages share: the settings of a small comparison, and what a page shows in the end."""

from pages import comparing


def settings(model: str, **changes) -> dict:
    """A comparison on a tiny model, as the page sends it."""
    values = (
        model,
        "what is this thing",
        4,
        "own",
        1,
        2,
        0,
        0.1,
        "candidates",
        6,
        0,
        1,
        0,
        0,
        "",
        "chat",
        2,
        None,
        None,
    )
    return dict(zip(comparing.NAMES, values, strict=True)) | changes


def collect(updates) -> dict:
    """Everything that a page would show in the end."""
    shown = {}
    for update in updates:
        shown |= update
    return shown
