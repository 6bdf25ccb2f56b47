# The trainer image: `docker build -f deploy/docker/trainer.Dockerfile --target cpu .`, or cuda or npu.
# Every external source is a build argument, so that the image can be built in a closed network: docs/deploy.md has the list.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=python:3.11-bookworm
ARG NPU_IMAGE=quay.io/ascend/vllm-ascend:v0.23.0

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

# -- cpu
FROM outside AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/trainer.txt /src/requirements/
RUN install.sh requirements /src/requirements/trainer.txt

FROM dependencies AS app
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
COPY pyproject.toml README.md /src/
COPY requirements/cpu.txt /src/requirements/
COPY polyreme /src/polyreme
COPY services/trainer /src/services/trainer
RUN install.sh packages /src /src/services/trainer

FROM runtime AS cpu
COPY --from=dependencies /opt/polyreme /opt/polyreme
COPY --from=app /opt/app /opt/app
COPY examples /opt/polyreme-examples
USER 10001:0
EXPOSE 8080
ENTRYPOINT ["polyreme"]
CMD ["train", "/polyreme/run.yaml", "output_dir=/runs", "--resume", "--host", "0.0.0.0", "--http-port", "8080"]

# -- cuda: on a base with a C compiler, since kernels are compiled at run time; CUDA's libraries come as wheels
FROM ${CUDA_IMAGE} AS dependencies-cuda
COPY --from=outside /certificates /certificates
COPY --from=outside /wheels /wheels
COPY --from=outside /usr/local/bin/install.sh /usr/local/bin/install.sh
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG CUDA_TORCH_INDEX=https://download.pytorch.org/whl/cu130
COPY requirements/cuda.txt /src/requirements/
RUN TORCH_INDEX=$CUDA_TORCH_INDEX install.sh requirements /src/requirements/cuda.txt

FROM dependencies-cuda AS app-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
COPY pyproject.toml README.md /src/
COPY requirements/cpu.txt /src/requirements/
COPY polyreme /src/polyreme
COPY services/trainer /src/services/trainer
RUN install.sh packages /src /src/services/trainer

FROM ${CUDA_IMAGE} AS cuda
COPY deploy/docker/install.sh /usr/local/bin/install.sh
RUN install.sh user
COPY deploy/docker/healthy.py /usr/local/lib/polyreme/healthy.py
ENV PATH=/opt/app/bin:/opt/polyreme/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 \
    HOME=/home/polyreme USER=polyreme LOGNAME=polyreme
WORKDIR /polyreme
COPY --from=dependencies-cuda /opt/polyreme /opt/polyreme
COPY --from=app-cuda /opt/app /opt/app
COPY examples /opt/polyreme-examples
USER 10001:0
EXPOSE 8080
ENTRYPOINT ["polyreme"]
CMD ["train", "/polyreme/run.yaml", "output_dir=/runs", "--resume", "--host", "0.0.0.0", "--http-port", "8080"]

# -- npu: on the vllm-ascend image, with its CANN, torch, torch_npu and vLLM unchanged
FROM ${NPU_IMAGE} AS dependencies-npu
USER root
COPY --from=outside /certificates /certificates
COPY --from=outside /wheels /wheels
COPY --from=outside /usr/local/bin/install.sh /usr/local/bin/install.sh
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ENV SYSTEM_PACKAGES=1
COPY requirements/npu.txt /src/requirements/
RUN install.sh requirements /src/requirements/npu.txt

FROM dependencies-npu AS app-npu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
COPY pyproject.toml README.md /src/
COPY requirements/cpu.txt /src/requirements/
COPY polyreme /src/polyreme
COPY services/trainer /src/services/trainer
RUN install.sh packages /src /src/services/trainer

FROM ${NPU_IMAGE} AS npu
USER root
COPY deploy/docker/install.sh /usr/local/bin/install.sh
RUN install.sh user
COPY deploy/docker/healthy.py /usr/local/lib/polyreme/healthy.py
COPY deploy/docker/ascend.sh /usr/local/bin/ascend.sh
ENV VLLM_ASCEND_ENABLE_NZ=0
ENV PATH=/opt/app/bin:/opt/polyreme/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 \
    HOME=/home/polyreme USER=polyreme LOGNAME=polyreme
WORKDIR /polyreme
COPY --from=dependencies-npu /opt/polyreme /opt/polyreme
COPY --from=app-npu /opt/app /opt/app
COPY examples /opt/polyreme-examples
USER 10001:0
EXPOSE 8080
ENTRYPOINT ["ascend.sh", "polyreme"]
CMD ["train", "/polyreme/run.yaml", "output_dir=/runs", "--resume", "--host", "0.0.0.0", "--http-port", "8080"]
