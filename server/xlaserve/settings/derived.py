"""Values derived from several settings."""

from xlaserve.settings import sagemaker_environment


class Derived:
    """Properties of `Settings`, which has these fields."""

    __slots__ = ()

    default_model: str
    modelmesh: bool
    sagemaker: bool
    sagemaker_multi_model: bool
    unix_socket_mode: int

    @property
    def socket_mode(self) -> int:
        """Return the permission bits of unix sockets."""
        if self.unix_socket_mode != -1:
            return self.unix_socket_mode
        return 0o666 if self.modelmesh else 0o660

    @property
    def bare_model(self) -> str:
        """Return the name of the model that the repository itself may be; empty for none."""
        if self.sagemaker and not self.sagemaker_multi_model:
            return self.default_model or sagemaker_environment.MODEL_NAME
        return ""
