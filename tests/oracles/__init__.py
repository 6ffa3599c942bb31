"""Independent NumPy float64 references of the methods; they import nothing of the package under test, which `package` runs."""
