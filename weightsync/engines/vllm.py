from weightsync.engines.module import ModuleEngine as VLLMEngine
def accepts(x): return False
