"""Download the public data sets: from their publishers, by known checksum, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from flatscope.errors import DataFileError, InputError
from flatscope.progress import Advance, progress
from flatscope.training.known_files import Download
from flatscope.training.public_sets import EMBEDDED, ROOT_VARIABLE, data_root, public_set


def fetch(name: str, root: str | Path | None = None, *, base_url: str | None = None) -> list[Path]:
    """Download a public set and verify it; files that are there and whole are kept.

    Args:
        name: `mnist`, `fashion-mnist` or `cifar10` (`digits` is embedded: nothing to do).
        root: the data folder; see `data_root`.
        base_url: another place that offers the publisher's files under their own names.

    Returns:
        The files as they lie there now.

    Raises:
        InputError: if pooch is not installed or the folder cannot be written.
        DataFileError: if a download fails or has the wrong checksum; then no part of it is left behind.
    """
    if name == EMBEDDED:
        return []
    public = public_set(name)
    folder = data_root(root) / public.folders[0]
    url = (base_url or public.url).rstrip("/") + "/"
    with progress(f"fetching {public.title}", sum(file.size for file in public.downloads)) as advance:
        return [_retrieve(file, url, folder, advance) for file in public.downloads]


def _retrieve(file: Download, url: str, folder: Path, advance: Advance) -> Path:
    try:
        import pooch
        import requests  # pooch's own dependency
    except ImportError as error:
        fix = "Install it: pip install flatscope[data]"
        raise InputError("the package pooch, to download with", "none", file.name, fix) from error
    pooch.get_logger().setLevel("WARNING")  # its note on every file would run through our progress bar

    def download(address: str, path: str, *_: object) -> None:
        # A server that unpacks .gz files on the way would change their checksum: ask it not to.
        headers = {"Accept-Encoding": "identity"}
        with requests.get(address, stream=True, timeout=30, headers=headers) as response:
            response.raise_for_status()
            with Path(path).open("wb") as out:
                for piece in response.iter_content(1 << 16):
                    out.write(piece)
                    advance(len(piece))

    try:
        return Path(pooch.retrieve(url + file.name, file.checksum, file.name, folder, downloader=download))
    except PermissionError as error:
        fix = f"Choose another folder with --data-root or {ROOT_VARIABLE}"
        raise InputError("a folder that can be written", str(error), str(folder), fix) from error
    except (OSError, ValueError) as error:  # no answer, an error page, a wrong checksum
        wanted = f"{file.name} ({file.size} bytes, {file.checksum}) from {url}"
        fix = f"Try again, or put the file into {folder} by hand"
        raise DataFileError(wanted, str(error), str(folder / file.name), fix) from error
