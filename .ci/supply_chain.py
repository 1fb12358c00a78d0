"""What flatscope stands on: is all of it pinned, may it be used, and which parts are they (a bill of materials).

    python .ci/supply_chain.py                 checks pins and licences of everything that any extra pulls in
    python .ci/supply_chain.py --sbom FILE     also writes the parts as CycloneDX JSON

It reads the metadata of what is installed, so that it needs no connection. Known weaknesses are another matter: they
need a database, which `pip-audit -r constraints.txt` asks where it can be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Licences that let anybody use, change and pass on what stands on them; the MPL asks for changes to its own files only.
ALLOWED = {
    "0bsd", "3-clause bsd license", "apache 2.0", "apache 2.0 license", "apache software license", "apache-2.0",
    "apache-2.0 with llvm-exception", "bsd license", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc0-1.0",
    "cnri-python", "isc", "isc license (iscl)", "mit", "mit license", "mit-0", "mit-cmu", "mpl-2.0",
    "mozilla public license 2.0 (mpl 2.0)", "psf-2.0", "python software foundation license", "zlib",
}  # fmt: skip
ABSENT = {"torchvision"}  # asked for by timm and backpack, never imported, and left out on purpose (see the Makefile)


def parts() -> dict[str, set[str]]:
    """Every installed package that flatscope or one of its extras pulls in, with the extras that do."""
    found: dict[str, set[str]] = {}
    for extra, asked in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        waiting, seen = [Requirement(text) for text in asked], {}
        while waiting:
            wanted = waiting.pop()
            name, extras = canonicalize_name(wanted.name), {"", *wanted.extras}
            if name == PROJECT["name"]:
                waiting += [Requirement(t) for inner in wanted.extras for t in PROJECT["optional-dependencies"][inner]]
            elif not extras <= seen.get(name, set()) and name not in ABSENT:
                seen[name] = extras | seen.get(name, set())
                inner = [Requirement(text) for text in _requires(name)]
                waiting += [r for r in inner if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)]
        for name in seen:
            found.setdefault(name, set()).add(extra)
    return found


def _requires(name: str) -> list[str]:
    return (requires(name) or []) if _is_here(name) else []


def _is_here(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def pins() -> dict[str, str]:
    """Version by package, as constraints.txt has them."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


def licence(name: str) -> str:
    """What the package says of its licence: the expression, else the classifiers, else the first line of the field."""
    said = metadata(name)
    classifiers = [
        text.rpartition(" :: ")[2] for text in said.get_all("Classifier") or () if text.startswith("License")
    ]
    return said["License-Expression"] or " AND ".join(classifiers) or (said["License"] or "none").splitlines()[0]


def is_allowed(text: str) -> bool:
    """Whether every licence that must be kept, and one of those to choose from, is among the allowed ones."""
    if text.lower() in ALLOWED:
        return True
    return all(any(one.strip("() ") in ALLOWED for one in each.split(" or ")) for each in text.lower().split(" and "))


def problems(found: dict[str, set[str]]) -> list[str]:
    """What is not as it should be, in words."""
    pinned = pins()
    wrong = [f"{name} is not in constraints.txt" for name in sorted(found) if name not in pinned]
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True).stdout.splitlines()
    wrong += [line for line in check if "requires" in line and not any(f"requires {name}," in line for name in ABSENT)]
    for name in filter(_is_here, sorted(found)):
        if pinned.get(name, version(name)) != version(name).partition("+")[0]:
            wrong.append(f"{name}: {version(name)} is installed, {pinned[name]} is pinned")
        if not is_allowed(licence(name)):
            wrong.append(f"{name}: the licence {licence(name)!r} is not among the allowed ones")
    return wrong


def bill(found: dict[str, set[str]]) -> str:
    """The parts as CycloneDX JSON; the same for the same parts and SOURCE_DATE_EPOCH."""
    components = [
        {
            "type": "library", "name": name, "version": version(name), "purl": f"pkg:pypi/{name}@{version(name)}",
            "bom-ref": f"pkg:pypi/{name}@{version(name)}", "licenses": [{"license": {"name": licence(name)}}],
            "scope": "required" if "" in extras else "optional",
            "properties": [{"name": "flatscope:extra", "value": extra or "core"} for extra in sorted(extras)],
        }
        for name, extras in sorted(found.items())
        if _is_here(name)
    ]  # fmt: skip
    text = re.search(r'__version__ = "(.*)"', (ROOT / "src/flatscope/version.py").read_text())
    own = {"type": "library", "name": PROJECT["name"], "version": text[1] if text else "", "bom-ref": PROJECT["name"]}
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")) or datetime.now().timestamp(), UTC)
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, components]))
    core = [part["bom-ref"] for part in components if part["scope"] == "required"]
    return json.dumps(
        {
            "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "serialNumber": f"urn:uuid:{number}",
            "metadata": {"timestamp": when.isoformat(timespec="seconds"), "component": own},
            "components": components, "dependencies": [{"ref": PROJECT["name"], "dependsOn": core}],
        },
        indent=1,
    )  # fmt: skip


def main() -> None:
    """Check, write, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sbom", type=Path, help="where to write the bill of materials")
    given, found = parser.parse_args(), parts()
    wrong = problems(found)
    print("\n".join(wrong) or f"{len(found)} packages: all pinned, all under licences that are allowed")
    if absent := [name for name in sorted(found) if not _is_here(name)]:
        print(f"not installed here, so that only their pins were looked at: {', '.join(absent)}")
    if given.sbom:
        given.sbom.write_text(bill(found) + "\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
