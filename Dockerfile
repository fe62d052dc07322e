# NVIDIA's server image (its own tritonserver, python stub and Python 3.12) with this project installed beside it. 26.07:
# a stub that died shows in readiness (26.01), no deadlock between the tensor pool and calls between models (26.07).
FROM nvcr.io/nvidia/tritonserver:26.07-py3

# The plain image has no torch. This layer is several GB and changes with its versions alone.
COPY deploy/requirements.txt /opt/inkling/
RUN pip install --no-cache-dir --break-system-packages -r /opt/inkling/requirements.txt

COPY pyproject.toml README.md /opt/inkling/
COPY kernels /opt/inkling/kernels
COPY inkling /opt/inkling/inkling
COPY model_repository /opt/inkling/model_repository
# --no-deps: everything is pinned above; the two commands end the build where something is missing after all.
RUN pip install --no-cache-dir --break-system-packages --no-deps /opt/inkling \
    && inkling health --help \
    && python3 -c "from inkling import server, tritonserver; print(tritonserver.model_repository())" \
    && install -d -o 1000 -g 1000 /var/cache/inkling

# What torch and triton compile is kept in /var/cache/inkling: a volume keeps it over containers.
ENV PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/inkling \
    TRITON_CACHE_DIR=/var/cache/inkling/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/inkling/inductor

# triton-server of the image
USER 1000:1000
# The image's own entry point looks at driver and /dev/shm, and then becomes the command.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "inkling", "serve"]
CMD ["--host", "0.0.0.0"]
