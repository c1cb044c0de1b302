"""torchrun --standalone --nproc-per-node=2 trainer_before.py"""

from small import bert, sentences, tell
from transformers import Trainer, TrainingArguments

model = bert()
arguments = TrainingArguments(
    per_device_train_batch_size=16,
    num_train_epochs=10,
    learning_rate=0.001,
    weight_decay=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    average_tokens_across_devices=False,
    use_cpu=True,
    save_strategy="no",
    report_to="none",
)
Trainer(model=model, args=arguments, train_dataset=sentences()).train()
tell(model)
