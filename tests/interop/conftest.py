"""The kernels run in Triton's interpreter where there is no GPU, chosen before they load."""

from tests.triton_backend.conftest import _interpreter

__all__ = ["_interpreter"]
