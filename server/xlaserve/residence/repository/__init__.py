"""Where models are found: directories, versions, names, stores."""
