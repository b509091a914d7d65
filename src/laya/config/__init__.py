"""laya.yaml and the environment, turned once into frozen structs. Everything else imports from here."""

from laya.config.load import load, loads
from laya.config.structs import *  # noqa: F403
from laya.config.structs import __all__ as _structs

__all__ = [*_structs, "load", "loads"]  # noqa: PLE0604
