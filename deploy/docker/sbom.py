"""Prints a CycloneDX 1.6 list of what is installed around it: `docker run --rm -i --entrypoint python3 IMAGE - NAME VERSION <sbom.py`.

It lists Python's distributions and Debian's packages. It uses the standard library only, since it runs inside the image, and the same image
gives the same bytes.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from shutil import which
from typing import Any
from urllib.parse import quote

_QUERY = "-f=${db:Status-Status} ${Package} ${Version} ${Architecture}\n"


def python_packages() -> list[dict[str, Any]]:
    return [
        component(each.name, each.version, f"pkg:pypi/{re.sub(r'[-_.]+', '-', each.name).lower()}@{quote(each.version, safe='')}")
        | licence(each)
        for each in distributions()
    ]


def licence(distribution: Distribution) -> dict[str, Any]:
    """Its licence as a list of CycloneDX, if the metadata states one in a line."""
    if expression := distribution.metadata.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    name = distribution.metadata.get("License") or ""
    return {"licenses": [{"license": {"name": name}}]} if name and len(name) < 80 and "\n" not in name else {}


def system_packages() -> list[dict[str, Any]]:
    if which("dpkg-query") is None:
        return []
    lines = subprocess.run(["dpkg-query", "-W", _QUERY], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split(" ")[1:] for line in lines if line.startswith("installed ")]
    return [
        component(name, version, f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}")
        for name, version, architecture in rows
    ]


def component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main() -> None:
    name, version = sys.argv[1:]
    found = {each["bom-ref"]: each for each in python_packages() + system_packages()}
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": [found[key] for key in sorted(found)],
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


main()
