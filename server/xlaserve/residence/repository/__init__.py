"""The model repository: directories, versions, names and object stores."""
