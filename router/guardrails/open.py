"""Opens the guards of a router."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from pdserve.config import refuse
from pdserve.net import rpc
from pdserve.security.patterns import Patterns
from pdserve.security.tls import tls_dialer
from router.guardrails.classifier import GuardClassifier
from router.guardrails.guard import NO_GUARDS, Guardrail, Guards, GuardVerdict, PatternChecker
from router.guardrails.services import ExtProcService, HttpService

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Mapping

    from pdserve.config import GuardConfig, RouterConfig
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo
    from router.guardrails.examples import Embed
    from router.guardrails.guard import Checker
    from router.guardrails.notes import VerdictNotes


# Makes the guards of a router, once embeddings can be computed.
GuardsOf = Callable[["Embed"], Guards]


def no_guards(_: Embed) -> Guards:
    return NO_GUARDS


@asynccontextmanager
async def open_guards(
    config: RouterConfig,
    notes: VerdictNotes,
    models: Callable[[], Mapping[str, ModelInfo]],
    tokenizer: Callable[[ModelInfo], Awaitable[Tokenizer]],
) -> AsyncIterator[GuardsOf]:
    """Open what guards need for the context. `models`, `tokenizer`: of classifiers. Raises
    ConfigError with the key of a file that cannot be used."""
    async with AsyncExitStack() as stack:
        checkers: list[Checker | None] = []
        for i, each in enumerate(config.guards):
            dialer = rpc.PLAIN
            if each.ca_file:
                dialer = tls_dialer(ca_file=each.ca_file, at=f"guards[{i}]")
            if each.url:
                checkers.append(HttpService(each.url, await _session(stack, dialer.context)))
            elif each.ext_proc:
                channel = dialer.open_channel(each.ext_proc)
                checkers.append(ExtProcService(await stack.enter_async_context(channel)))
            elif each.classifier.model:
                checkers.append(None)
            else:
                checkers.append(_pattern_checker(each, f"guards[{i}]"))

        def guards_of(embed: Embed) -> Guards:
            guards = []
            for each, known in zip(config.guards, checkers, strict=True):
                checker = known
                if checker is None:
                    checker = GuardClassifier(each, models, tokenizer, embed)
                    stack.push_async_callback(checker.close)
                guards.append(Guardrail(each, checker, notes))
            return Guards(guards, notes.recent)

        yield guards_of


async def _session(stack: AsyncExitStack, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Open a session. `tls`: None to verify certificates by the CAs of the system."""
    # Guardrail.check limits time and calls.
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )
    return await stack.enter_async_context(session)


def _pattern_checker(config: GuardConfig, key: str) -> PatternChecker:
    words = [*config.words]
    if config.words_file:
        key = f"{key}.words_file"
        try:
            lines = Path(config.words_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            refuse(key, f"cannot be read: {error}")
        words += filter(None, map(str.strip, lines))
        if long := next((x for x in words if len(x) > config.hold_back_chars), ""):
            refuse(key, f"has {long[:40]!r}, which is longer than hold_back_chars")
    try:
        patterns = Patterns(config.patterns, words, longest=config.hold_back_chars)
    except ValueError as error:
        refuse(key, str(error))
    return PatternChecker(patterns, GuardVerdict(config.verdict), config.replacement)
