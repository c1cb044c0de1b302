"""The names that this project imports from transformers, for the type checker alone.

The package's own `__init__` imports all of its modules by stars, which takes pyright a quarter of its time. A name
that is imported for the first time gets its line here.
"""

from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.data.data_collator import default_data_collator as default_data_collator
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.albert.configuration_albert import AlbertConfig as AlbertConfig
from transformers.models.albert.modeling_albert import (
    AlbertForSequenceClassification as AlbertForSequenceClassification,
)
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM as AutoModelForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForImageClassification as AutoModelForImageClassification,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bart.configuration_bart import BartConfig as BartConfig
from transformers.models.bart.modeling_bart import BartForConditionalGeneration as BartForConditionalGeneration
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM as BertForMaskedLM,
)
from transformers.models.bert.modeling_bert import (
    BertForQuestionAnswering as BertForQuestionAnswering,
)
from transformers.models.bert.modeling_bert import (
    BertForSequenceClassification as BertForSequenceClassification,
)
from transformers.models.bert.modeling_bert import (
    BertForTokenClassification as BertForTokenClassification,
)
from transformers.models.bert.modeling_bert import (
    BertModel as BertModel,
)
from transformers.models.blip.configuration_blip import BlipConfig as BlipConfig
from transformers.models.blip.modeling_blip import BlipModel as BlipModel
from transformers.models.bloom.configuration_bloom import BloomConfig as BloomConfig
from transformers.models.bloom.modeling_bloom import BloomForCausalLM as BloomForCausalLM
from transformers.models.clap.configuration_clap import ClapConfig as ClapConfig
from transformers.models.clap.modeling_clap import ClapModel as ClapModel
from transformers.models.clip.configuration_clip import CLIPConfig as CLIPConfig
from transformers.models.clip.modeling_clip import CLIPModel as CLIPModel
from transformers.models.distilbert.configuration_distilbert import DistilBertConfig as DistilBertConfig
from transformers.models.distilbert.modeling_distilbert import (
    DistilBertForSequenceClassification as DistilBertForSequenceClassification,
)
from transformers.models.electra.configuration_electra import ElectraConfig as ElectraConfig
from transformers.models.electra.modeling_electra import ElectraForPreTraining as ElectraForPreTraining
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig as GptOssConfig
from transformers.models.jamba.configuration_jamba import JambaConfig as JambaConfig
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mamba.configuration_mamba import MambaConfig as MambaConfig
from transformers.models.mamba.modeling_mamba import MambaForCausalLM as MambaForCausalLM
from transformers.models.marian.configuration_marian import MarianConfig as MarianConfig
from transformers.models.marian.modeling_marian import MarianMTModel as MarianMTModel
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM as MixtralForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM as Phi3ForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.resnet.configuration_resnet import ResNetConfig as ResNetConfig
from transformers.models.resnet.modeling_resnet import ResNetForImageClassification as ResNetForImageClassification
from transformers.models.rwkv.configuration_rwkv import RwkvConfig as RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvForCausalLM as RwkvForCausalLM
from transformers.models.siglip.configuration_siglip import SiglipConfig as SiglipConfig
from transformers.models.siglip.modeling_siglip import SiglipModel as SiglipModel
from transformers.models.swin.configuration_swin import SwinConfig as SwinConfig
from transformers.models.swin.modeling_swin import SwinForImageClassification as SwinForImageClassification
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration as T5ForConditionalGeneration
from transformers.models.umt5.configuration_umt5 import UMT5Config as UMT5Config
from transformers.models.vit.configuration_vit import ViTConfig as ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification as ViTForImageClassification
from transformers.models.whisper.configuration_whisper import WhisperConfig as WhisperConfig
from transformers.models.whisper.modeling_whisper import (
    WhisperForConditionalGeneration as WhisperForConditionalGeneration,
)
from transformers.tokenization_utils_base import (
    BatchEncoding as BatchEncoding,
)
from transformers.tokenization_utils_base import (
    PreTrainedTokenizerBase as PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.training_args import TrainingArguments as TrainingArguments
