"""Texts of the report in its two languages, English and Chinese."""

from samestep.display.page import Words

HEADING = Words("{job}: methods side by side", "{job}：各种方法并排对比")
INTRO = Words(
    "{measured} of {methods} methods were measured, with {processes} processes on {cores} cores, {repeats} runs "
    "each, interleaved. All train one job: the same data in the same order, the same initial weights, a global batch "
    "of {batch} samples, precision {precision} where a row says nothing else.",
    "{methods} 种方法中测量了 {measured} 种：{processes} 个进程，{cores} 个核，每种运行 {repeats} 次，交替进行。"
    "所有方法训练同一个任务：数据与顺序相同，初始权重相同，全局批大小 {batch}，未注明时精度为 {precision}。",
)
PASSED = Words(
    "Every synchronous method that ran took the optimizer steps of one process.",
    "所有跑起来的同步方法，都走出了与单进程相同的优化器步。",
)
NOT_PASSED = Words(
    "Not every synchronous method took the optimizer steps of one process; see the column “same step”.",
    "并非所有同步方法都走出了与单进程相同的优化器步；见“同一步”一列。",
)
TABLE = Words("Time", "时间")
ABOUT_TIMES = Words(
    "Seconds of training are those of the steps, data included. Start-up is the rest of the wall time without "
    "evaluation: processes, imports, reading the data, building the model, writing files.",
    "训练秒数只算训练步，包含取数据。启动是墙钟时间减去训练和评估之后剩下的部分：启动进程、导入、读数据、建模型、写文件。",
)
COSTS = Words("Memory, messages, result", "内存、消息与结果")
ABOUT_COSTS = Words(
    "Memory is a rank's peak: of its accelerator, or of main memory on CPUs, where Python and its libraries are part "
    "of it. The first 5 losses are held against one process in float64, in separate runs without dropout: in float64 "
    "where the engine has it, else in float32; bf16 methods in bf16.",
    "内存是一个 rank 的峰值：有加速器时是显存，在 CPU 上是主内存，其中包含 Python 和各个库。前 5 步的损失与 float64 "
    "单进程比较，另外单独运行，关闭 dropout：引擎支持 float64 就用 float64，否则用 float32；bf16 方法用 bf16。",
)
REMARKS = Words("What the runs said", "运行时的提示")
TIME = Words("Time and its spread", "时间与波动")
ABOUT_SPREAD = Words(
    "Bars reach to the median, lines from the fastest to the slowest run.",
    "条形到中位数为止，细线从最快的一次到最慢的一次。",
)
LOSS = Words("Loss curves", "损失曲线")
ABOUT_LOSS = Words(
    "Of each method's first run. Where all take the same steps the curves lie over each other; a click on a name "
    "hides its curve.",
    "取每种方法的第一次运行。步步相同时，曲线重叠在一起；点击名称可以隐藏对应曲线。",
)
SCORE = Words("Over time: {metric}", "随时间的变化：{metric}")
ABOUT_SCORE = Words(
    "On held-out samples, each seen once in every evaluation. Evaluations are not part of the time.",
    "在留出样本上评估，每次评估每个样本只看一次。评估时间不计入横轴。",
)
MEMORY = Words("Memory of each rank", "每个 rank 的内存")
ABOUT_MEMORY = Words(
    "Bars reach to the largest rank; a dot is a rank.", "条形到最大的 rank 为止；一个点是一个 rank。"
)
TRAFFIC = Words("Bytes sent by each rank", "每个 rank 发送的字节")
ABOUT_TRAFFIC = Words(
    "In one step, counted by the formulas of ring algorithms from the messages that pass torch.distributed.",
    "一步之内，按环形算法的公式，从经过 torch.distributed 的消息算出。",
)
PUBLISHED = Words("Compared with the published results", "与已发表的结果对比")
ABOUT_PUBLISHED = Words(
    "A Chinese BERT fine-tuned on six classes with two GPUs, in minutes, from the fastest to the slowest. Minutes "
    "there and seconds here are of other models on other machines; what can be compared are the speed-ups and the "
    "order. Its faults: Horovod did not learn, DeepSpeed and Accelerate evaluated every sample twice, and a row with "
    "mixed precision stands among rows without. Here every row is held against the same reference, and evaluates "
    "every sample once.",
    "那里用两块 GPU 微调中文 BERT，六分类，单位是分钟，从快到慢排列。那里的分钟和这里的秒来自不同的模型和机器；"
    "能比较的是加速比和名次。它的问题：Horovod 没有学到东西，DeepSpeed 和 Accelerate 把每个样本评估了两次，"
    "混合精度的一行与没有用混合精度的行排在一起。这里每一行都与同一个参照比较，每个样本只评估一次。",
)
MACHINE = Words("Machine and versions", "机器与版本")

STATUS = {
    "refused": Words("not for this job", "不适用于这个任务"),
    "not installed": Words("not installed", "没有安装"),
    "failed": Words("failed", "失败"),
}
SAME = Words("yes", "是")
NOT_SAME = Words("NO", "否")
ASYNCHRONOUS = Words("asynchronous: promises none", "异步：不作此承诺")
NOT_MEASURED = Words("not measured", "没有测量")
