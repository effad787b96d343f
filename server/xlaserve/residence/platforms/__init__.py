"""How ModelMesh and SageMaker load and unload models."""
