"""Sections of every process: where it runs and how it logs."""

from __future__ import annotations

from typing import Annotated

from pdserve.config.fields import LogFormat, LogLevel, Section, about


class TopologyConfig(Section, frozen=True):
    """Where the process runs, in names of your own. Routers prefer workers of their own region and
    zone, and pairs of workers that are near each other. Empty: unknown."""

    region: Annotated[str, about("Label of the region.")] = ""
    zone: Annotated[str, about("Label of the zone.")] = ""
    host: Annotated[str, about("Label of the host.")] = ""

    @property
    def labels(self) -> dict[str, str]:
        """The labels that are set, by level."""
        found = {level: str(getattr(self, level)) for level in self.__struct_fields__}
        return {level: label for level, label in found.items() if label}


class LogConfig(Section, frozen=True):
    """The log of the process."""

    level: Annotated[LogLevel, about("Lowest level that is logged.")] = "info"
    format: Annotated[
        LogFormat,
        about("Format of the log. `json`: a line of JSON for each record, vLLM's included."),
    ] = "text"
