"""MNIST, Fashion-MNIST and CIFAR-10 on disk: find their files, verify them, read them.

The files may lie there plain, as gzip or xz, in the publisher's tar archive or (CIFAR-10) as python batches:
the same bytes must come out, and their checksum is compared before anything is made of them.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flatscope.errors import DataFileError, InputError, refuse_unknown
from flatscope.inputs import formats
from flatscope.inputs.known_files import SETS, Download, KnownFile, PublicSet
from flatscope.progress import Advance, progress_bar
from flatscope.samples import Split

Arrays = tuple[formats.Bytes, npt.NDArray[np.int64]]

ROOT_VARIABLE = "FLATSCOPE_DATA"
EMBEDDED = "digits"
PACKINGS = ("", ".gz", ".xz")


@dataclass(frozen=True)
class Place:
    """Place of a known file: a path, the member if that is a tar file, and whether it is a python batch."""

    path: Path
    member: str = ""
    pickled: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.member}" if self.member else str(self.path)


@dataclass(frozen=True)
class FileCheck:
    """State of one file by `verify`; sizes and checksums are those of the unpacked content."""

    name: str
    status: Literal["ok", "damaged", "missing"]
    where: str
    expected_size: int
    expected_sha256: str
    found_size: int | None = None
    found_sha256: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Listing:
    """One line of `available`: a data set and how much of it lies under the root."""

    name: str
    title: str
    status: Literal["embedded", "complete", "incomplete", "absent"]
    folder: Path | None
    missing: tuple[str, ...]
    shape: tuple[int, int, int]
    n_train: int
    n_test: int
    n_classes: int


def data_root(root: str | Path | None = None) -> Path:
    """The folder that data sets lie in: `root`, else `$FLATSCOPE_DATA`, else the user's cache folder."""
    chosen = root or os.environ.get(ROOT_VARIABLE)
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "flatscope").expanduser()


def public_set(name: str) -> PublicSet:
    """The public set of that name."""
    refuse_unknown(name, [*SETS, EMBEDDED], "data set")
    return SETS[name]


def locate_set_files(public: PublicSet, root: Path) -> dict[str, Place]:
    """Places of the files of a set under `root`: in the first of the folders that have the most of them."""
    best: dict[str, Place] = {}
    for folder in (*(root / name for name in public.folders), root):
        places = _places_in(folder, public)
        # The IDX sets name their files alike: loose ones in the root belong to whichever has these labels.
        if folder == root and any(_is_of_another_set(file, places, public) for file in public.files):
            continue
        if len(places) > len(best):
            best = places
    return best


def _places_in(folder: Path, public: PublicSet) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for file in public.files:
        candidates = [Place(folder / (file.name + suffix)) for suffix in PACKINGS]
        if file.name.endswith(".bin"):  # CIFAR-10's python batches have the same names without it
            stem = file.name.removesuffix(".bin")
            candidates += [Place(folder / (stem + suffix), pickled=True) for suffix in PACKINGS]
        for archive in public.archives:
            pickled = "python" in archive
            candidates.append(Place(folder / archive, file.name.removesuffix(".bin" if pickled else ""), pickled))
        present = next((place for place in candidates if place.path.is_file()), None)
        if present:
            places[file.name] = present
    return places


def _is_of_another_set(file: KnownFile, places: dict[str, Place], public: PublicSet) -> bool:
    if "labels" not in file.name or file.name not in places:
        return False
    try:
        digest = hashlib.sha256(formats.read_bytes(places[file.name].path)).hexdigest()
    except DataFileError:
        return False
    return any(other.sha256 == digest for known in SETS.values() if known != public for other in known.files)


def _unpacked_content(file: KnownFile, place: Place, members: dict[str, bytes]) -> bytes:
    """Unpacked content in the publisher's binary layout."""
    if place.member and place.member not in members:
        wanted = f"{place.member} ({file.size} bytes) in the archive"
        raise DataFileError(wanted, "none", str(place.path), formats.REPLACE)
    content = members[place.member] if place.member else formats.read_bytes(place.path, file.size)
    return formats.cifar_records_from_pickle(content, str(place)) if place.pickled else content


def _tar_members(places: dict[str, Place]) -> dict[str, bytes]:
    """The tar members among the places, each archive read once from front to back."""
    wanted: dict[Path, list[str]] = {}
    for place in places.values():
        if place.member:
            wanted.setdefault(place.path, []).append(place.member)
    members: dict[str, bytes] = {}
    for path, names in wanted.items():
        members |= formats.read_tar(path, names)
    return members


def _checked_file(file: KnownFile, place: Place, content: bytes) -> FileCheck:
    digest = hashlib.sha256(content).hexdigest()
    detail = ""
    if digest != file.sha256:
        owners = [known.title for known in SETS.values() for other in known.files if other.sha256 == digest]
        detail = f"this is a file of {owners[0]}" if owners else "the content differs from the published one"
    status: Literal["ok", "damaged"] = "damaged" if detail else "ok"
    return FileCheck(file.name, status, str(place), file.size, file.sha256, len(content), digest, detail)


def verify(name: str, root: str | Path | None = None) -> list[FileCheck]:
    """Compare every file of a public set with its published checksum.

    Args:
        name: `mnist`, `fashion-mnist` or `cifar10` (`digits` is embedded and has no files: an empty list).
        root: the data folder; see `data_root`.
    """
    if name == EMBEDDED:
        return []
    public = public_set(name)
    folder = data_root(root)
    places = locate_set_files(public, folder)
    try:
        members, broken = _tar_members(places), ""
    except DataFileError as error:
        members, broken = {}, str(error)
    checks = []
    with progress_bar(f"verifying {public.title}", len(public.files)) as advance:
        for file in public.files:
            checks.append(_verify_file(file, places.get(file.name), members, broken, folder))
            advance()
    return checks


def _verify_file(file: KnownFile, place: Place | None, members: dict[str, bytes], broken: str, root: Path) -> FileCheck:
    if place is None:
        return FileCheck(file.name, "missing", str(root), file.size, file.sha256)
    if place.member and broken:
        return FileCheck(file.name, "damaged", str(place), file.size, file.sha256, detail=broken)
    try:
        return _checked_file(file, place, _unpacked_content(file, place, members))
    except (DataFileError, OSError) as error:
        return FileCheck(file.name, "damaged", str(place), file.size, file.sha256, detail=str(error))


def available(root: str | Path | None = None) -> list[Listing]:
    """Every data set that has a name, and whether its files lie under the root."""
    listings = [Listing(EMBEDDED, "scikit-learn digits", "embedded", None, (), (1, 8, 8), 1437, 360, 10)]
    for public in SETS.values():
        places = locate_set_files(public, data_root(root))
        missing = tuple(file.name for file in public.files if file.name not in places)
        status: Literal["complete", "incomplete", "absent"]
        status = "absent" if not places else "incomplete" if missing else "complete"
        folder = next((place.path.parent for place in places.values()), None)
        counts = (public.n_train, public.n_test, len(public.classes))
        listings.append(Listing(public.name, public.title, status, folder, missing, public.shape, *counts))
    return listings


def read_part(name: str, part: Split, root: str | Path | None = None) -> Arrays:
    """Images (n, c, h, w) uint8 and labels (n,) int64 of one part, read-only; every byte checked.

    A repeated call in one process does not read again unless a file has changed.

    Raises:
        DataFileError: if a file is missing or its content is not the published one.
    """
    public = public_set(name)
    folder = data_root(root)
    places = locate_set_files(public, folder)
    files = tuple(file for file in public.files if file.part == part)
    missing = [file.name for file in files if file.name not in places]
    if missing:
        got = f"no {', '.join(missing)}" if folder.is_dir() else "no such folder"
        where = f"{folder} (searched with its subfolders {', '.join(f'{name}/' for name in public.folders)})"
        fix = f"Fetch them with `flatscope data fetch {public.name}`, or say where: --data-root, {ROOT_VARIABLE}"
        raise DataFileError(f"the files of {public.title}", got, where, fix)
    chosen = tuple(places[file.name] for file in files)
    stamps = tuple((stat.st_mtime_ns, stat.st_size) for stat in (place.path.stat() for place in chosen))
    try:
        return _read_part(public, files, chosen, stamps)
    except DataFileError as error:
        # A damaged plain file would be found again before the fetched one: it has to go first.
        fix = f"{error.fix}. Remove it and run `flatscope data fetch {public.name}`"
        raise DataFileError(error.expected, error.got, error.where, fix) from error


@functools.lru_cache(maxsize=4)
def _read_part(
    public: PublicSet, files: tuple[KnownFile, ...], places: tuple[Place, ...], stamps: tuple[Any, ...]
) -> Arrays:
    contents = list(_verified_contents(public, files, places))
    if files[0].name.endswith(".bin"):
        batches = [formats.parse_cifar(content) for content in contents]
        images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))  # (n, 3, 32, 32)
    else:
        images, labels = formats.parse_idx(contents[0])[:, None], formats.parse_idx(contents[1])  # (n, 1, 28, 28)
    wide = labels.astype(np.int64)
    images.setflags(write=False)  # the cache hands the same arrays to everyone
    wide.setflags(write=False)
    return images, wide


def _verified_contents(public: PublicSet, files: tuple[KnownFile, ...], places: tuple[Place, ...]) -> Iterator[bytes]:
    members = _tar_members({file.name: place for file, place in zip(files, places, strict=True)})

    def checked(file: KnownFile, place: Place) -> bytes:
        content = _unpacked_content(file, place, members)
        check = _checked_file(file, place, content)
        if check.status != "ok":
            wanted = f"{public.title}'s {file.name} ({file.size} bytes, sha256 {file.sha256[:12]}…)"
            got = f"{len(content)} bytes, sha256 {(check.found_sha256 or '')[:12]}…: {check.detail}"
            raise DataFileError(wanted, got, str(place), formats.REPLACE)
        return content

    # Unpacking and hashing release the interpreter lock: threads halve the time for xz files on two cores.
    reading = progress_bar(f"reading {public.title}", len(files))
    with ThreadPoolExecutor(max_workers=4) as pool, reading as advance:
        for content in pool.map(checked, files, places):
            advance()
            yield content


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
    with progress_bar(f"fetching {public.title}", sum(file.size for file in public.downloads)) as advance:
        return [_download_file(file, url, folder, advance) for file in public.downloads]


def _download_file(file: Download, url: str, folder: Path, advance: Advance) -> Path:
    try:
        import pooch
        import requests  # pooch's own dependency
    except ImportError as error:
        fix = "Install it: pip install pooch"
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
