"""What crosses a network between two processes: one port, connections that outlive their sockets, seals, storages."""
