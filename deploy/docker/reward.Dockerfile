# The reward image: `docker build -f deploy/docker/reward.Dockerfile .`. It has no torch; with REQUIREMENTS=reward-torch it does.
# The gateway and the environment service run from it, too: they need nothing else.
# Every external source is a build argument, so that the image can be built in a closed network: docs/deploy.md has the list.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG REDIS_IMAGE=reward

# -- shared: up to the next section all three files are identical, so that they share layers
FROM ${PYTHON_IMAGE} AS outside
ARG WHEELS=deploy/wheels
ARG CERTIFICATES=deploy/certificates
COPY ${CERTIFICATES} /certificates
COPY ${WHEELS} /wheels
COPY deploy/docker/install.sh /usr/local/bin/install.sh

FROM ${PYTHON_IMAGE} AS runtime
COPY deploy/docker/install.sh /usr/local/bin/install.sh
RUN install.sh user
COPY deploy/docker/healthy.py /usr/local/lib/polyreme/healthy.py
ENV PATH=/opt/app/bin:/opt/polyreme/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 \
    HOME=/home/polyreme USER=polyreme LOGNAME=polyreme
WORKDIR /polyreme

# -- reward
FROM outside AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG REQUIREMENTS=reward
COPY requirements/${REQUIREMENTS}.txt /src/requirements/
RUN install.sh requirements /src/requirements/${REQUIREMENTS}.txt

FROM dependencies AS app
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
COPY pyproject.toml README.md /src/
COPY requirements/cpu.txt /src/requirements/
COPY polyreme /src/polyreme
COPY services/reward /src/services/reward
COPY services/environment /src/services/environment
RUN install.sh packages /src /src/services/reward /src/services/environment

FROM runtime AS reward
COPY --from=dependencies /opt/polyreme /opt/polyreme
COPY --from=app /opt/app /opt/app
# Links Polyreme's Valkey as `redis-server`, so that this image can also be the stack's Redis.
RUN ln -s "$(find /opt/polyreme -name valkey-server)" /usr/local/bin/redis-server \
    && mkdir /data && chown 10001:0 /data && chmod 2770 /data
USER 10001:0
EXPOSE 50051 8080
ENTRYPOINT ["polyreme"]
CMD ["reward", "--host", "0.0.0.0", "--port", "50051", "--http-port", "8080"]

# -- redis: the stack's Redis, by default from this image
FROM ${REDIS_IMAGE} AS redis
