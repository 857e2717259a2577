"""Read a page's words, to compare them with what a test has found."""

from launch import ROOT


def words_of(folder: str) -> str:
    """Return the README of a folder with each white space made one.

    So a sentence is found however its lines are wrapped.
    """
    return " ".join((ROOT / folder / "README.md").read_text("utf-8").split())
