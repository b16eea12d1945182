"""A web server on a node as a service, and a request to it through a forwarded port. Needs nothing, costs nothing."""

import urllib.request

import skypool as sky

PORT = 8642


@sky.compute
def write_page() -> None:
    with open("page.txt", "w") as page:
        page.write(f"this page is on node {sky.instance_info().node}\n")


if __name__ == "__main__":
    with sky.ComputePool(slots=1) as pool:
        write_page() @ pool
        serve = sky.cmd("python", "-m", "http.server", str(PORT), "--bind", "127.0.0.1")
        with pool.service(serve, restart=True) as server:  # takes no slot: calls go on beside it
            server.wait_ready(PORT)
            with pool.forward(PORT, node=server.node) as forward:
                with urllib.request.urlopen(f"{forward.url}/page.txt") as answer:
                    print(answer.read().decode(), end="")
        print("its processes are gone:", not server.is_running)
