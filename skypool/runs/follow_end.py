"""Sends the output files of a program to the client. A node runs this text as a program, with its own Python.

Its arguments are the folder of the files, the number of a file and a position in it. It sends pieces of the files until
the client closes the connection. Before each piece come the number of its file, its position and its length. A piece of
length 0 says that the node no longer has what the client asked for. Two lengths mean something else: `CURRENT` says
that all was sent that is there, and `OVER` that the program has ended; the content of the file "end" follows.
"""

import os
import select
import struct
import sys
import time

PIECE = struct.Struct("!III")
CURRENT, OVER = (1 << 32) - 1, (1 << 32) - 2
EVERY = 1.0


def main(folder: str, number: int, position: int) -> None:
    """Send all records from a position on."""
    client = select.poll()
    client.register(1, 0)  # errors alone: the other end is closed
    patience = 0.01
    told = time.monotonic()
    while not client.poll(0):
        numbers = kept(folder)
        if not numbers:
            time.sleep(0.01)
            continue
        if number < numbers[0]:
            number, position = numbers[0], 0
            send(PIECE.pack(number, 0, 0))
        with open(os.path.join(folder, str(number)), "rb") as file:
            file.seek(position)
            while not client.poll(0):
                is_last = number >= kept(folder)[-1]  # asked before the file is read: nothing is written to it later
                end = end_of(folder)  # and this is written last
                data = file.read(1 << 20)
                if data:
                    send(PIECE.pack(number, position, len(data)) + data)
                    position += len(data)
                    patience = 0.01
                elif is_last and end:
                    send(PIECE.pack(number, position, OVER) + end)
                    client.poll()  # the client closes the connection
                elif is_last:
                    if time.monotonic() - told > EVERY:
                        told = time.monotonic()
                        send(PIECE.pack(number, position, CURRENT))
                    time.sleep(patience)
                    patience = min(0.2, patience * 1.5)
                else:
                    number, position = number + 1, 0
                    break


def kept(folder: str) -> list[int]:
    """Return the numbers of the files, from the oldest; [] before there is one."""
    if not os.path.exists(os.path.join(folder, "end")):
        return []
    return sorted(int(each) for each in os.listdir(folder) if each.isdigit())


def end_of(folder: str) -> bytes:
    """Return the content of the file that tells of the end; b"" before the end."""
    with open(os.path.join(folder, "end"), "rb") as file:
        data = file.read()
    return data if data[:1] == b"\1" else b""


def send(data: bytes) -> None:
    """Write all of it to the client."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
