"""TLS: versions, client certificates, and certificates that are replaced while connections are open."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import time
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from h2.connection import H2Connection
from h2.settings import SettingCodes

from blink_proto.arena import Finish
from tests import tiny_text
from tests.certificates import Authority, Pair
from tests.front_end import FrontEnd, eventually, front_end
from tests.raw_http import body, dial, post, read_all, read_until
from tests.replay import Script


def dial_tls(front: FrontEnd, trust: ssl.SSLContext) -> ssl.SSLSocket:
    port = int(front.https.rsplit(":", 1)[1])
    return trust.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10), server_hostname="127.0.0.1")


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


def shown_name(front: FrontEnd, trust: ssl.SSLContext) -> str:
    """The common name that a new handshake is shown."""
    with dial_tls(front, trust) as raw:
        made = x509.load_der_x509_certificate(raw.getpeercert(binary_form=True) or b"")
    return str(made.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)


def flags(pair: Pair) -> tuple[str, ...]:
    return ("--workers", "1", "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))


def test_versions(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")

    def version(front: FrontEnd, only: ssl.TLSVersion) -> str | None:
        trust = trusting(authority)
        trust.set_ciphers("DEFAULT:@SECLEVEL=0")
        trust.minimum_version = trust.maximum_version = only
        with dial_tls(front, trust) as raw:
            return raw.version()

    with front_end(*flags(pair)) as front:
        assert version(front, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        assert version(front, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises((ssl.SSLError, ConnectionError)):
            version(front, ssl.TLSVersion.TLSv1_1)
    with front_end(*flags(pair), "--tls-min-version", "1.3") as front:
        assert version(front, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            version(front, ssl.TLSVersion.TLSv1_2)


def test_a_new_certificate_is_taken_up_and_a_bad_one_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = trusting(authority)
    folders = {}
    for name in ("first", "second", "third"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        pair = authority.sign(name)
        shutil.move(pair.certificate, folders[name] / "tls.crt")
        shutil.move(pair.key, folders[name] / "tls.key")
    mounted = tmp_path / "mounted"
    mounted.mkdir()

    def point_to(folder: Path) -> None:
        """As Kubernetes does: the link above the files is replaced by one rename."""
        draft = mounted / "..data_tmp"
        draft.symlink_to(folder)
        draft.replace(mounted / "..data")

    point_to(folders["first"])
    for name in ("tls.crt", "tls.key"):
        (mounted / name).symlink_to(Path("..data") / name)
    with front_end(*flags(Pair(mounted / "tls.crt", mounted / "tls.key"))) as front:
        front.device.script = lambda s: Script(tiny_text.byte_ids(b"x" * 100), Finish.STOP, every=0.05)
        assert shown_name(front, trust) == "first"
        open_stream = dial_tls(front, trust)
        open_stream.sendall(post(body(stream=True)))
        read_until(open_stream, b"data: ")
        point_to(folders["second"])
        eventually(lambda: shown_name(front, trust) == "second")
        # a certificate without its key: half of a rotation, or a mistake
        shutil.copy(folders["third"] / "tls.crt", folders["second"] / "tls.crt")
        eventually(lambda: b"kept the old certificate" in front.log.read_bytes())
        assert shown_name(front, trust) == "second"
        assert 'blink_tls_reloads_total{outcome="failed"} 1.0' in httpx.get(front.http + "/metrics").text
        shutil.copy(folders["third"] / "tls.key", folders["second"] / "tls.key")
        eventually(lambda: shown_name(front, trust) == "third")
        os.remove(folders["second"] / "tls.crt")
        eventually(lambda: front.log.read_bytes().count(b"kept the old certificate") == 2)
        assert shown_name(front, trust) == "third"
        rest = read_until(open_stream, b"0\r\n\r\n")
        assert b'"finish_reason":"stop"' in rest, "the stream outlives three certificates"
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_client_certificates(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other", "other")
    pair, client, stranger = authority.sign("server"), authority.sign("client"), other.sign("stranger")

    def ask(front: FrontEnd, shown: Pair | None, *, http2: bool = False) -> int:
        trust = trusting(authority)
        if shown is not None:
            trust.load_cert_chain(shown.certificate, shown.key)
        with httpx.Client(verify=trust, http2=http2) as session:
            return session.get(front.https + "/health").status_code

    with front_end(*flags(pair), "--tls-client-ca", str(authority.certificate)) as front:
        assert ask(front, client) == 200
        assert ask(front, client, http2=True) == 200
        for shown in (None, stranger):
            with pytest.raises(httpx.TransportError):
                ask(front, shown)
        assert httpx.get(front.http + "/health").status_code == 200, "plain HTTP is another address"
        shutil.copy(other.certificate, authority.certificate)
        with pytest.raises(httpx.TransportError):
            eventually(lambda: ask_with(front, client, pair) != 200)


def ask_with(front: FrontEnd, shown: Pair, trusted: Pair) -> int:
    """Trusting the server's certificate itself, as its authority's file may hold another one by now."""
    trust = ssl.create_default_context(cafile=str(trusted.certificate))
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust.load_cert_chain(shown.certificate, shown.key)
    return httpx.get(front.https + "/health", verify=trust).status_code


def test_a_handshake_that_drips_has_its_time(tmp_path: Path) -> None:
    with front_end("--workers", "1", "--header-timeout", "1") as front:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            raw = dial(front.https)
            raw.sendall(sent)
            began = time.monotonic()
            read_all(raw)
            assert 0.5 < time.monotonic() - began < 3


@pytest.mark.parametrize("http2", [False, True])
def test_a_client_that_never_reads_is_cut_off(tmp_path: Path, http2: bool) -> None:
    with front_end("--workers", "1", "--write-timeout", "1") as front:
        front.device.script = lambda s: Script(tiny_text.byte_ids(b"x" * 240), Finish.NONE, every=0.02)
        trust = ssl.create_default_context(cafile=front.certificate)
        trust.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
        wrapped = trust.wrap_socket(dial(front.https, receive_buffer=2048), server_hostname="127.0.0.1")
        asked = body(stream=True, n=4, logprobs=20, max_tokens=240)
        wrapped.sendall(opened(asked) if http2 else post(asked))
        eventually(lambda: front.device.playing == 4)
        eventually(lambda: front.device.playing == 0, timeout=15)
        assert front.device.finished[Finish.CANCELLED] == 4
        assert front.device.finished[Finish.LENGTH] == 0
        wrapped.close()


def opened(asked: bytes) -> bytes:
    """A whole request as an HTTP/2 client sends it, with all the window that there is."""
    client = H2Connection()
    client.initiate_connection()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 24})
    client.increment_flow_control_window(1 << 24)
    pseudo = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "https"), (":authority", "x")]
    client.send_headers(1, pseudo)
    client.send_data(1, asked, end_stream=True)
    return client.data_to_send()


def test_garbage_in_place_of_a_handshake_harms_nobody(tmp_path: Path) -> None:
    with front_end("--workers", "1") as front:
        port = int(front.https.rsplit(":", 1)[1])
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"a" * 1000, b""):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(sent)
        trust = ssl.create_default_context(cafile=front.certificate)
        assert httpx.get(front.https + "/health", verify=trust).status_code == 200
