"""Tables of the store, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
)

metadata = MetaData()

# Routers that hold claims. A router's claims end when other routers find `beats` unchanged.
routers = Table(
    "pdserve_routers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("beats", BigInteger, nullable=False),
    Column("seen_at", Float, nullable=False),
)

# Idempotency keys. `answer` is NULL while `owner` generates it.
keys = Table(
    "pdserve_keys",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("claim", Text, nullable=False, unique=True),
    Column("answer", LargeBinary),
    Column("bytes", BigInteger, nullable=False, default=0),
    Column("expires_at", Float, nullable=False),
    Index("pdserve_keys_expiry", "expires_at"),
)

files = Table(
    "pdserve_files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("lines", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Index("pdserve_files_tenant", "tenant", "created_at"),
    Index("pdserve_files_expiry", "expires_at"),
)

# `lines` is the number of lines in the input file. It counts for the tenant's quota until the batch
# ends. `ended_at` is 0 until then.
batches = Table(
    "pdserve_batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("status", Text, nullable=False),
    Column("errors", LargeBinary, nullable=False, default=b"[]"),
    Column("times", LargeBinary, nullable=False, default=b"{}"),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("total", BigInteger, nullable=False, default=0),
    Column("completed", BigInteger, nullable=False, default=0),
    Column("failed", BigInteger, nullable=False, default=0),
    Column("owner", Text, nullable=False, default=""),
    Column("lines", BigInteger, nullable=False),
    Column("ended_at", BigInteger, nullable=False, default=0),
    Index("pdserve_batches_tenant", "tenant", "created_at"),
    Index("pdserve_batches_end", "ended_at"),
)

# Lines of open batches. `result` is NULL until the line is answered.
lines = Table(
    "pdserve_lines",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("custom_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("result", LargeBinary),
    Column("succeeded", SmallInteger, nullable=False, default=0),
)

# A conversation is a first response and all its continuations. They are kept and expire together,
# because a response is useless without the earlier ones.
conversations = Table(
    "pdserve_conversations",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("responses", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("used_at", Float, nullable=False),
    Index("pdserve_conversations_usage", "tenant", "used_at", "responses", "bytes"),
    Index("pdserve_conversations_expiry", "used_at"),
)

# `items`: input items of the response's own request. `previous`: the response before.
responses = Table(
    "pdserve_responses",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("conversation", Text, nullable=False),
    Column("previous", Text),
    Column("body", LargeBinary, nullable=False),
    Column("items", LargeBinary, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index("pdserve_responses_conversation", "tenant", "conversation"),
)
