#!/bin/sh
# secrets.sh FILE: writes .env.example with new secrets to FILE, readable only by its owner. Does not change an existing file.
set -eu
cd "$(dirname "$0")/.."
umask 077
if [ -e "$1" ]; then
    echo "$1 already exists"
    exit 0
fi
secret() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
while IFS= read -r line; do
    case $line in
    POLYREME_SERVE_KEY=) echo "${line}tml-$(secret)" ;; # the clients' SDK takes no other key
    POLYREME_*=) echo "$line$(secret)" ;;
    *) echo "$line" ;;
    esac
done <.env.example >"$1.partial"
mv "$1.partial" "$1"
echo "wrote new secrets to $1"
