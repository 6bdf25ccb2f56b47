#!/bin/sh
# certs.sh FOLDER [NAME...]: creates a CA, and one certificate from it for all services, for mutual TLS.
#
# The certificate has the name `polyreme`, which clients check independently of the address (security.server_name), and the additional NAMEs
# (DNS:host, IP:address). An existing CA is kept and signs a new certificate. Its key has no other use and may be stored elsewhere.
set -eu
umask 077
folder=$1
shift
mkdir -p "$folder"
cd "$folder"
if [ ! -e ca.key ]; then
    openssl ecparam -genkey -name prime256v1 -noout -out ca.key
    openssl req -x509 -new -key ca.key -sha256 -days 3650 -subj "/CN=Polyreme CA" -out ca.pem \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi
names="DNS:polyreme,DNS:localhost,IP:127.0.0.1"
for name in "$@"; do
    names="$names,$name"
done
openssl ecparam -genkey -name prime256v1 -noout | openssl pkcs8 -topk8 -nocrypt -out key.pem
openssl req -new -key key.pem -subj "/CN=polyreme" -out request.pem
cat >extensions.cnf <<END
subjectAltName=$names
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
END
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -sha256 -days 825 -extfile extensions.cnf -out certificate.pem 2>/dev/null
rm -f request.pem extensions.cnf ca.srl
chmod 644 ca.pem certificate.pem
# Containers read them as POLYREME_USER, or as group 0.
chmod 750 .
chmod 640 key.pem
echo "$(pwd): ca.pem, certificate.pem, key.pem for $names"
