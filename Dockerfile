# NVIDIA's server image with this project installed for the python stub (Python 3.12 there). 26.07 fixes a deadlock
# between the tensor pool and calls between models; a stub that died shows in readiness from 26.01 on.
FROM nvcr.io/nvidia/tritonserver:26.07-py3
COPY pyproject.toml README.md /opt/inkling/
COPY kernels /opt/inkling/kernels
COPY inkling /opt/inkling/inkling
COPY model_repository /opt/inkling/model_repository
RUN pip install --no-cache-dir /opt/inkling
ENV PYTHONDONTWRITEBYTECODE=1
USER triton-server
