import secrets

import pytest
from s3fs import S3FileSystem

from tests.ext.mirror.servers import CREDENTIALS, Proxy, make_bucket, s3_server


@pytest.fixture(scope="session")
def s3_port():
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(s3_port, monkeypatch):
    """What lies between this process and the S3 server."""
    made = Proxy(s3_port)
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.port}"}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    yield made
    made.mode = "gone"
    made.close()
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(s3_port, proxy):
    """The URL of an empty mirror on the S3 server, through the proxy."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    make_bucket(s3_port, bucket)
    return f"s3://{bucket}/run"
