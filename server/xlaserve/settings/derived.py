"""How settings are read, and what follows from several of them together."""

import os
from collections.abc import Mapping
from typing import Self, get_type_hints

from xlaserve.settings import sagemaker_environment
from xlaserve.settings.reading import read_values


class Derived:
    """The reader and the properties of `Settings`, which has these fields."""

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

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **flags: object) -> Self:
        """Merge flags over the environment over the defaults. A flag of None was not given.

        With `sagemaker` the variables of SageMaker come between environment and defaults. Values
        may be texts as on a command line. Raises InvalidSettings for one that cannot be
        read, and for an `XLASERVE_` variable that names no setting.
        """
        environ = os.environ if environment is None else environment
        return cls(**read_values(get_type_hints(cls), environ, flags))
