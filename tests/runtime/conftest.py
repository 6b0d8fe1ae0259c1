"""What all tests of the runtime share."""

from ops.conftest import kernels_at_every_size  # noqa: F401
