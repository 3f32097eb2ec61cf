"""Unclear sentences that were rewritten in plain English do not return."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = Path(__file__).with_name("old_sentences.txt")
"""One sentence per line, in the form that `normalised` returns."""


def normalised(text: str) -> str:
    """Return a text in lower case without line breaks and without the marks of Markdown, comments and strings."""
    return " ".join(re.sub(r"[`*\"#\\]|</?[a-z]+>", " ", text).split()).lower()


def test_no_old_sentence_is_left() -> None:
    """No page and no program contains one of the sixty rewritten sentences."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    old = SENTENCES.read_text().splitlines()
    left = {
        f"{path}: {sentence}"
        for path in set(listed.stdout.splitlines())
        for text in [normalised((ROOT / path).read_text())]
        for sentence in old
        if sentence in text
    }

    assert len(old) == 60
    assert left == set()
