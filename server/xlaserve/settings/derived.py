"""Reads settings, and derives values from several of them."""

import os
from collections.abc import Mapping
from typing import Self, get_type_hints

from xlaserve.settings import sagemaker_environment
from xlaserve.settings.reading import read_values


class Derived:
    """Base class of `Settings`, with its reader and derived properties."""

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
        """Return the model's name if the repository itself may be a model, or an empty string."""
        if self.sagemaker and not self.sagemaker_multi_model:
            return self.default_model or sagemaker_environment.MODEL_NAME
        return ""

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **flags: object) -> Self:
        """Read settings from flags, then the environment, then defaults. A flag of None is absent.

        With `sagemaker`, SageMaker's variables take precedence over defaults only. Values may be
        strings as on a command line. Raises InvalidSettings for a value that cannot be parsed, and
        for an `XLASERVE_` variable that names no setting.
        """
        environ = os.environ if environment is None else environment
        return cls(**read_values(get_type_hints(cls), environ, flags))
