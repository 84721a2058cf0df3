"""Contents of files, in a folder or in an S3 bucket."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pdserve.errors import ConfigError, QuotaExceeded
from router.store.database import StoreUnavailable, Threads

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

BUCKET = "s3://"
# Deadline of one call: writing a part of a file, or sending a whole file to a bucket.
CALL_S = 60.0
_THREADS = 8
_S3_TIMEOUT_S, _S3_RETRIES = 20, 2


class Upload:
    """A file that is being written. `FileStore.keep` completes it, `discard` removes it."""

    def __init__(self, threads: Threads, path: Path, file_id: str, max_bytes: int) -> None:
        self.id, self.path = file_id, path
        self.size = self.lines = 0
        self._threads, self._max_bytes = threads, max_bytes
        self._ends_line = True
        with disk_errors():
            # Readable by this user alone from the start, because files contain prompts of tenants.
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "wb")

    async def write(self, data: bytes) -> None:
        """Append `data`. Raises QuotaExceeded, or StoreUnavailable if the disk is full or fails."""
        if self.size + len(data) > self._max_bytes:
            raise QuotaExceeded(
                f"the tenant's files may have {self._max_bytes} bytes more "
                "(router.store.quotas.files_mib)",
                field="file",
            )
        await self._threads.run(partial(self._write, data))
        self.size += len(data)
        self.lines += data.count(b"\n") + self._ends_line - data.endswith(b"\n")
        self._ends_line = data.endswith(b"\n")

    def _write(self, data: bytes) -> None:
        with disk_errors():
            self._file.write(data)

    def sync(self) -> None:
        """Flush the bytes to disk and close the file. Blocks."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Remove the file. Never raises."""
        # The name first, because closing writes buffered bytes, which fails on a full disk.
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._file.close()


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise StoreUnavailable if the disk is full or fails."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnavailable(f"the disk failed: {error.strerror}") from error


class Folder:
    """Contents in a folder. Routers that share a store must share its folder too."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder cannot be used."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o002:
                raise ConfigError(f"{folder} is writable by everyone", field="store")
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"cannot use {folder}: {error}", field="store") from error

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def keep(self, upload: Upload) -> None:
        """Make an upload durable. Blocks."""
        with disk_errors():
            upload.sync()
            # The name is durable only once the folder is flushed too.
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def open(self, file_id: str) -> IO[bytes]:
        """Open a file for reading. Raises FileNotFoundError."""
        with disk_errors():
            return self.path(file_id).open("rb")

    def delete(self, file_id: str) -> None:
        with disk_errors():
            self.path(file_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: a folder holds no resources."""

    def older_than(self, age_s: float) -> list[str]:
        """Return the names of files that were not written to for `age_s` seconds."""
        before = time.time() - age_s
        found = []
        # The folder may also hold the database.
        for path in self._folder.glob("file-*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    found.append(path.name)
        return found


class Bucket:
    """Contents in a bucket, as `s3://bucket/prefix`. An upload is on the local disk until it is
    complete. Endpoint and credentials come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and others."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError if the bucket cannot be used."""
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError as error:
            text = "s3:// needs the extra s3: pip install 'pdserve[s3]'"
            raise ConfigError(text, field="store.files") from error
        self._s3 = obstore
        self._error, self._missing = exceptions.BaseError, exceptions.NotFoundError
        seconds = timedelta(seconds=_S3_TIMEOUT_S)
        try:
            self._bucket = S3Store.from_url(
                url,
                client_options={
                    "timeout": seconds,
                    "connect_timeout": seconds / 4,
                    "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
                },
                retry_config={"max_retries": _S3_RETRIES, "retry_timeout": seconds},
            )
        except self._error as error:
            raise ConfigError(f"cannot use {url}: {error}", field="store.files") from error
        try:
            # Fail now and not at the first upload if the bucket or the credentials are wrong. List
            # one page only, because listing the whole bucket may take minutes.
            next(iter(obstore.list(self._bucket, chunk_size=1)), None)
        except self._error as error:
            reason = str(error).partition("\n")[0]
            # Any error but a refusal may be temporary.
            if not isinstance(error, exceptions.GenericError) or "status code: 4" in reason:
                raise ConfigError(f"cannot use {url}: {reason}", field="store.files") from error
            logger.warning("%s does not answer; uploads fail until it does: %s", url, reason)
        self._spool = tempfile.TemporaryDirectory(prefix="pdserve-uploads-")

    def path(self, file_id: str) -> Path:
        return Path(self._spool.name) / file_id

    def keep(self, upload: Upload) -> None:
        with self._calling(), disk_errors():
            upload.sync()
            self._s3.put(self._bucket, upload.id, upload.path)
            upload.path.unlink()

    def open(self, file_id: str) -> IO[bytes]:
        """Fetch a file to the local disk and open it. Raises FileNotFoundError."""
        with self._calling(), disk_errors(), ExitStack() as stack:
            fetched = stack.enter_context(tempfile.TemporaryFile(dir=self._spool.name))
            for chunk in self._s3.get(self._bucket, file_id):
                fetched.write(chunk)
            fetched.seek(0)
            stack.pop_all()
            return fetched

    def delete(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)
        with self._calling(), suppress(FileNotFoundError):
            self._s3.delete(self._bucket, file_id)

    def older_than(self, age_s: float) -> list[str]:
        with self._calling():
            found = [x for page in self._s3.list(self._bucket) for x in page]
        before = time.time() - age_s
        return [
            x["path"]
            for x in found
            if x["path"].startswith("file-") and x["last_modified"].timestamp() < before
        ]

    @contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            yield
        except self._missing as error:
            raise FileNotFoundError(str(error)) from error
        except self._error as error:
            raise StoreUnavailable(f"the bucket failed: {error}") from error

    def close(self) -> None:
        self._spool.cleanup()


def open_contents(where: str) -> Folder | Bucket:
    """Open a folder, or a bucket if `where` is s3://. Blocks. Raises ConfigError."""
    return Bucket(where) if where.startswith(BUCKET) else Folder(Path(where))


def make_threads() -> Threads:
    return Threads(_THREADS, CALL_S)
