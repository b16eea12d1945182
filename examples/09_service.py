"""A web server on a node as a service, and a request to it through a forwarded port. Needs nothing, costs nothing.

It prints "this page is on node 0", among other lines.
"""

import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import skypool as sky

PORT = 8642


@sky.compute
def serve(port: int) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"this page is on node {sky.instance_info().node}".encode())

    HTTPServer(("127.0.0.1", port), Page).serve_forever()


if __name__ == "__main__":
    with sky.ComputePool(slots=1) as pool:
        with pool.service(serve(PORT), restart=True) as server:
            server.wait_ready(PORT)
            sky.cmd("echo", "a service takes no slot, so calls run beside it") >> pool
            with pool.forward(PORT, node=server.node) as forward:
                with urllib.request.urlopen(forward.url) as answer:
                    print(answer.read().decode())
        print("its processes are gone:", not server.is_running)
