"""A source package without what differs from machine to machine: times, owners, modes and the order of its files."""

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path

path, epoch = Path(sys.argv[1]), int(os.environ["SOURCE_DATE_EPOCH"])
with tarfile.open(path) as given:
    members = [(member, given.extractfile(member)) for member in given.getmembers()]
    contents = [(member, file.read() if file else b"") for member, file in members]
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as plain:
    for member, content in sorted(contents, key=lambda pair: pair[0].name):
        clean = tarfile.TarInfo(member.name)
        clean.type, clean.size, clean.mtime = member.type, len(content), epoch
        clean.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        plain.addfile(clean, io.BytesIO(content))
with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as zipped:
    zipped.write(packed.getvalue())
