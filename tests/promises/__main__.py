"""Write docs/promises.md: `python -m tests.promises`."""

from tests.promises.page import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page())
