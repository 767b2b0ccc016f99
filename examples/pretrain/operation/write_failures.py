"""Files that cannot be written: one message that names the folder and the cause."""

import contextlib
import errno
import os
import pathlib
import re
from collections.abc import Iterator

from examples.pretrain.errors import AGAIN, RunError, UsageError

# What the system answers where it does not let a program write.
_NOT_WRITTEN = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.EIO,
}  # fmt: skip
_CODE_OF_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Names the folder and the cause where a file cannot be written.

    Raises:
      RunError: If that is behind an error.
    """
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:
        cause = why_not_written(error)
        if cause is None:
            raise
        raise RunError(f"{folder} cannot be written to: {cause}.\n{AGAIN}") from error


def why_not_written(error: BaseException) -> str | None:
    """The system's words, such as "No space left on device", if they are behind an error.

    The operating system's own error may be the cause of the error, or a part of a group,
    and TensorStore only quotes it.
    """
    for origin in _origins(error):
        if isinstance(origin, OSError):
            code, file = origin.errno, origin.filename
        else:
            quoted = _CODE_OF_TENSORSTORE.search(str(origin))
            code, file = int(quoted[1]) if quoted else None, None
        if code in _NOT_WRITTEN:
            return os.strerror(code) + (f": {file}" if file else "")
    return None


def _origins(error: BaseException) -> Iterator[BaseException]:
    """An error, those that it groups, and what they come from."""
    yield error
    grouped = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for origin in (*grouped, error.__cause__ or error.__context__):
        if origin is not None:
            yield from _origins(origin)
