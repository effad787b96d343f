"""The model repository: directories, versions, names and stores."""
