"""Sends the output files of a program to the client. A node runs this text as a program, with its own Python.

Its arguments are the folder of the files, the number of a file and a position in it. Before the data of a file it
writes a line with the number of the file; then come the records, until the end of the program or of the connection.
"""

import os
import struct
import sys
import time

HEAD = struct.Struct("!BI")


def main(folder: str, number: int, position: int) -> None:
    """Send all records from a position on."""
    patience = 0.01
    while True:
        there = sorted(int(each) for each in os.listdir(folder) if each.isdigit()) if os.path.isdir(folder) else []
        if not there:
            time.sleep(0.05)
            continue
        if number < there[0]:
            number, position = there[0], 0  # what was here is no longer kept
        path = os.path.join(folder, str(number))
        with open(path, "rb") as file:
            file.seek(position)
            while True:
                data = file.read(1 << 20)
                if data:
                    os.write(1, struct.pack("!III", number, position, len(data)))
                    position += len(data)
                    view = memoryview(data)
                    while view:
                        view = view[os.write(1, view) :]
                    patience = 0.01
                elif number < max(int(each) for each in os.listdir(folder) if each.isdigit()):
                    if file.read(1):  # what was written before the next file was begun
                        file.seek(position)
                        continue
                    number, position = number + 1, 0
                    break
                else:
                    time.sleep(patience)
                    patience = min(0.2, patience * 1.5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
