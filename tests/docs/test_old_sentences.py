"""Sentences that were rewritten in plain English stay away."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = Path(__file__).with_name("old_sentences.txt")
"""One sentence a line, as `normalised` returns it."""


def normalised(text: str) -> str:
    """Return a text in lower case without line breaks and marks of Markdown, comments and strings."""
    return " ".join(re.sub(r"[`*\"#\\]|</?[a-z]+>", " ", text).split()).lower()


def test_no_old_sentence_is_left() -> None:
    """None of the sixty sentences that the guide of the language rewrote is in a page or in a program."""
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
