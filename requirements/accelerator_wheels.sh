#!/bin/sh
# accelerator_wheels.sh PYTHON FOLDER VERSION ARCH: fills FOLDER with the wheels that bench/accelerator.py needs on a machine that has torch and
# transformers: those of requirements/accelerator.txt for Linux with a Python VERSION (3.12) on ARCH (x86_64 or aarch64), and Polyreme's own.
set -eu
python=$1 folder=$2 version=$3 arch=$4
most_kib=$((60 * 1024))
here=$(dirname "$0")

# pip takes a wheel only for a platform that is named; a machine with torch has a C library of 2.28 or newer.
platforms="--platform manylinux2014_$arch --platform manylinux1_$arch"
for minor in 5 12 17 24 27 28; do platforms="$platforms --platform manylinux_2_${minor}_$arch"; done

rm -rf "$folder"
"$here/dist.sh" "$python" "$folder" >/dev/null
rm -f "$folder"/*.tar.gz
# shellcheck disable=SC2086
"$python" -m pip download -q --no-deps --only-binary :all: --python-version "$version" $platforms -d "$folder" -r "$here/accelerator.txt"
kib=$(du -sk "$folder" | cut -f1)
[ "$kib" -le "$most_kib" ] || {
    echo "expected at most $most_kib KiB of wheels; found $kib in $folder. Fix: drop what the bench does not import (requirements/images.py)" >&2
    exit 1
}
echo "$folder: $(ls "$folder" | wc -l) wheels, $((kib / 1024)) MiB, for Python $version on $arch"
