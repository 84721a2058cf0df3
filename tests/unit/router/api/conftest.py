"""Both APIs of the router on real sockets, in front of a generator that follows a script."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import openai
import pytest
from scripted import (
    CORS_ORIGIN,
    MAX_BODY_BYTES,
    MAX_MODEL_LEN,
    MODEL,
    TEMPLATE,
    TIMEOUT_S,
    VOCAB_SIZE,
    Apis,
    ScriptedGenerator,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdserve import rpc
from pdserve.client import Client
from pdserve.config import SloConfig
from pdserve.http_server import HttpServer, bind
from pdserve.tokenizer import Tokenizer as ModelTokenizer
from pdserve.tokenizer import read_files
from pdserve.types import ModelInfo
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from router.accounting import Accounting
from router.admission import AdmissionController, AdmissionLimits
from router.api.auth import EVERYONE, Keys
from router.api.grpc import Generation
from router.api.http import HttpApi
from router.api.open_requests import OpenRequests
from router.api.pooling import PoolingApi
from router.api.preprocess import Preprocessor
from router.api.responses import ResponseApi
from router.batch.store import BatchStore
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.pooling import Embedder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer of single bytes and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=261,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


async def read_tokenizer(model: ModelInfo) -> ModelTokenizer:
    """The tokenizer in the directory of the model."""
    return ModelTokenizer.load(read_files(Path(model.path)))


@pytest.fixture
def generator(model_dir: Path) -> ScriptedGenerator:
    info = ModelInfo(MODEL, str(model_dir), MAX_MODEL_LEN, VOCAB_SIZE, "float32")
    return ScriptedGenerator({MODEL: info})


@pytest.fixture
def token_ids(model_dir: Path) -> Callable[[str], tuple[int, ...]]:
    """What the test's tokenizer makes of a text."""
    fast = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda text: tuple(fast.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def keys() -> Keys:
    """Those that the apis ask for: none, unless a test module says otherwise."""
    return EVERYONE


@pytest.fixture
async def apis(generator: ScriptedGenerator, keys: Keys, tmp_path: Path) -> AsyncIterator[Apis]:
    async with AsyncExitStack() as stack:
        open_requests = OpenRequests()
        preprocessor = Preprocessor(
            generator.models, generator.adapters, timeout_s=TIMEOUT_S, load=read_tokenizer
        )
        # No worker computes embeddings here.
        admission = AdmissionController(AdmissionLimits())
        metrics = RouterMetrics(SloConfig())
        accounting = Accounting({}, metrics.count)
        embedder = Embedder(Fleet(router_id="r"), admission, metrics, accounting)
        store = BatchStore(tmp_path / "batches", "router")
        stack.push_async_callback(store.close)
        api = HttpApi(
            generator,
            preprocessor,
            open_requests,
            lambda _: (b"pdserve_up 1\n", "text/plain"),
            generator,
            keys,
            [CORS_ORIGIN],
            responses=ResponseApi(store),
            pooling=PoolingApi(embedder, preprocessor),
        )
        sock = bind("127.0.0.1", 0)
        host, port = sock.getsockname()
        web = HttpServer(api.handle, sock, max_body_bytes=MAX_BODY_BYTES)
        await web.start()
        stack.push_async_callback(web.stop)
        server = rpc.make_server()
        add_GenerationServicer_to_server(
            Generation(generator, preprocessor, open_requests, keys), server
        )
        grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        yield Apis(
            url=f"http://{host}:{port}",
            host=host,
            port=port,
            grpc_address=grpc_address,
            generator=generator,
            open_requests=open_requests,
            session=await stack.enter_async_context(aiohttp.ClientSession()),
            client=await stack.enter_async_context(Client(grpc_address)),
        )


@pytest.fixture
async def official(apis: Apis) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{apis.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
